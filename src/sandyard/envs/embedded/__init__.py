"""Small envs that run in this process: nothing to deploy, the same episode for the same seed."""
