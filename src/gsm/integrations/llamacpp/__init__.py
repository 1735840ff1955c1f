"""llama.cpp as a back end: endless generation in a window of fixed size, with GSM choosing what is forgotten."""

from gsm.integrations.llamacpp.choose import Protected, choose_ranges
from gsm.integrations.llamacpp.endless import Endless, EndlessOptions, load_gguf
from gsm.integrations.llamacpp.generate import generate_gguf

__all__ = ["Endless", "EndlessOptions", "Protected", "choose_ranges", "generate_gguf", "load_gguf"]
