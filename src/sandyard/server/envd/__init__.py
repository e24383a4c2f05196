"""E2B's in-sandbox service (`envd`), answered by the server on top of the agent."""
