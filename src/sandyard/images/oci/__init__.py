"""OCI and Docker images: names, registries, archives, and layers unpacked once for every template."""
