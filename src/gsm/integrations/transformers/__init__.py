"""GSM inside Hugging Face transformers: `attach`, `Cache`, `prefill`. The only files that name its internals."""

from gsm.integrations.transformers.attach import Attached, attach
from gsm.integrations.transformers.cache import Cache
from gsm.integrations.transformers.forward import cache_kwarg, prefill
from gsm.integrations.transformers.synthetic import fill_with_noise, observe_kv

__all__ = ["Attached", "Cache", "attach", "cache_kwarg", "fill_with_noise", "observe_kv", "prefill"]
