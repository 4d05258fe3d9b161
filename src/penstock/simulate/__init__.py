"""A network of nodes on a virtual clock, in one process: real engines, routes and messages, and layers that only take time."""
