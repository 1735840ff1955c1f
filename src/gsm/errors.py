"""Every error that GSM raises on purpose.

GsmError
├── ConfigError           a setting is unknown, impossible or contradicts another
├── ModelError            a model cannot be found, read or loaded
│   └── UnsupportedModel  the architecture is known not to work, and why
├── InputError            a prompt, text or file that cannot be used
├── AttachError           the model cannot be wrapped, or is used in a way the wrapper cannot serve
├── KVError               the KV store cannot do what was asked
│   ├── OutOfPages        no page is free and the pool may not grow
│   └── KVIntegrityError  reference counts and tables disagree: a bug in GSM, please report it
└── MeasurementError      a measurement could not be taken or would be meaningless

Each message is one sentence: what happened, the value seen, and the remedy.
"""

from __future__ import annotations


class GsmError(Exception):
    """Base class of all errors raised by GSM."""


class ConfigError(GsmError):
    """A setting is unknown, impossible or contradicts another."""


class ModelError(GsmError):
    """A model cannot be found, read or loaded."""


class UnsupportedModel(ModelError):
    """The architecture is known not to work with GSM; the message says why."""


class InputError(GsmError):
    """A prompt, text or file cannot be used."""


class AttachError(GsmError):
    """The model cannot be wrapped, or is used in a way the wrapper cannot serve."""


class KVError(GsmError):
    """The KV store cannot do what was asked."""


class OutOfPages(KVError):
    """No page is free and the pool may not grow."""


class KVIntegrityError(KVError):
    """Reference counts and tables disagree: a bug in GSM."""


class MeasurementError(GsmError):
    """A measurement could not be taken or would be meaningless."""


class EngineError(GsmError):
    """The engine cannot serve a request."""


class QueueFull(EngineError):
    """Too many requests wait already; try again later."""


class EngineDead(EngineError):
    """The engine's thread ended with an error; the server must be restarted."""
