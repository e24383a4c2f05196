"""The memory of microVMs: taken while they run or end, kept by what changed, given to any number of copies."""
