"""`python -m sandyard` is the `sandyard` command."""

from sandyard.cli import main

main()
