"""The Model Context Protocol both ways: its servers' tools as tools of ours, and a sandbox's tools over it.

Needs the extra `mcp`."""
