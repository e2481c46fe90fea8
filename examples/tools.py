"""Tools that a model may call; see tools.yaml. Annotations and docstrings are what it is told of them."""


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


TOOLS = [add, multiply]
