"""A real CPython for each session, forked from one warm process and confined before foreign code runs.

`server` is where to start reading: it starts the fork server (`inside/`, standard library only, which runs in a
minimal root of its own) and opens sessions; `session` runs programs in one.
"""
