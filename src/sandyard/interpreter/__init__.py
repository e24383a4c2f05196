"""The code interpreter: `program/` runs inside a sandbox, the rest makes the template it is in."""
