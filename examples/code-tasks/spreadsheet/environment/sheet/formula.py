"""Formulas: from text to something that `evaluate` can work with."""


def parse(text):
    """The formula after the `=`."""
    raise NotImplementedError("formulas")
