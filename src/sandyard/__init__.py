"""Sandyard: a yard of sandboxes for agentic RL, and the trainer that learns from what happened there."""

import sandyard.exiting  # noqa: F401 - first, so that its handler at exit is the last to run
