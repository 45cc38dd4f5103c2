"""What is asked of the planner.

- ``request``: all of it; ``presets``: well-known strategies as constraints; ``pins``: what some parameters must be.
"""
