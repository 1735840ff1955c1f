"""Converting a model's attention to fewer kv heads (GQA, arXiv:2305.13245), with the price measured."""

from gsm.convert.gqa import ConvertSpec, convert_gqa
from gsm.convert.record import ConvertResult, PerplexityChange, UptrainRecord

__all__ = ["ConvertResult", "ConvertSpec", "PerplexityChange", "UptrainRecord", "convert_gqa"]
