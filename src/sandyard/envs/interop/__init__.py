"""Our envs as other trainers take them: `trl` and `twinkle`. Neither package is imported here."""
