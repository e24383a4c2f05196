"""Many episodes of one env over few worker processes, or in this one: see `sandyard.envs.pool.pool`."""
