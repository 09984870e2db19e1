"""swapper: the card changes hands, the conversations come back."""

__version__ = "0.1.0"
