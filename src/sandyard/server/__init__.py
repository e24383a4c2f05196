"""The server: E2B's control plane and data plane over HTTP. Start reading at `app`."""
