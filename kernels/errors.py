"""The one error of this package."""


class LayoutError(ValueError):
    """Bad input to a routine or a layout: the sentence names tensor, shape, rule and remedy.

    It is raised before anything is written, so inputs and outputs are as they were.
    """
