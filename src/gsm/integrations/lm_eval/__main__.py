"""`lm_eval` with the model `gsm` registered."""

from lm_eval.__main__ import cli_evaluate

import gsm.integrations.lm_eval  # noqa: F401  registers the model

if __name__ == "__main__":
    cli_evaluate()
