"""What runs in the fork server and in the sessions: the standard library only, nothing of the host's packages."""
