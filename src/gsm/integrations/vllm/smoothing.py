"""Window smoothing."""


def register_layer() -> None:
    pass
