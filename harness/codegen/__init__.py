"""The code a kernel becomes on a target that is not here, and bounds from its data sheet."""
