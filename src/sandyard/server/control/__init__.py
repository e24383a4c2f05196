"""The control plane: E2B's REST API, and Sandyard's own additions to it."""
