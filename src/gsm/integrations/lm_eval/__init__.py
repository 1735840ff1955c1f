"""The lm-evaluation-harness model `gsm`: a Hugging Face model whose cache GSM manages.

`python -m gsm.integrations.lm_eval --model gsm --model_args pretrained=demo,config=sparse --tasks ...` is its own
command line with the model registered; from Python, importing this package registers it.
"""

from gsm.integrations.lm_eval.model import GsmLM

__all__ = ["GsmLM"]
