"""What vLLM's workers can be asked over its own remote calls: `--worker-extension-cls`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gsm.config import fingerprint
from gsm.errors import GsmError
from gsm.integrations.vllm.live import Live, live_of


class GsmWorkerExtension:
    """Methods that vLLM adds to its worker class. Answers are plain dicts, one per rank."""

    vllm_config: Any
    rank: int

    def _gsm_live(self) -> Live:
        live = live_of(self.vllm_config)
        if live is None:
            raise GsmError("this engine was started without a GSM config; restart it with --additional-config")
        return live

    def gsm_reload(self, values: dict[str, Any]) -> dict[str, Any]:
        """Take over a config. Where it is refused the answer says why, and nothing has changed."""
        try:
            self._gsm_live().reload(values)
        except GsmError as error:
            return {"rank": self.rank, "error": str(error)}
        return self.gsm_status()

    def gsm_status(self) -> dict[str, Any]:
        """Epoch, config and counters of this rank."""
        live = self._gsm_live()
        return {
            "rank": self.rank,
            # the index: engines of dense models know nothing of each other, and each calls its rank 0
            "data_parallel_rank": self.vllm_config.parallel_config.data_parallel_index,
            "epoch": live.epoch,
            "fingerprint": fingerprint(live.config),
            "config": live.config.model_dump(mode="json"),
            "counters": asdict(live.counters),
        }
