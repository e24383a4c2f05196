"""OpenEnv both ways: a server of any env of ours, and a client to any server."""
