"""The engine vLLM with pages in two tiers: an out-of-tree plugin.

    export WAKEKV_VLLM='{"mode": "reactive", "budget": 32, "every": 4}'
    python -m vllm.entrypoints.openai.api_server --model ...

or, from Python, wakekv.vllm.engine.start(model, Settings(...)). Without the variable the engine is untouched.

settings.py what can be asked; scoring.py and kernels.py compiled loops; tier.py the fast tier; steps.py a decode step;
ragged.py and shared.py the same where heads share a budget;
backend.py which requests decode; scheduler.py what happens to those that lose their place; cpu.py and cuda.py a device;
plugin.py how the engine comes to use it; remote.py what a worker answers; engine.py starts an engine and feeds it.
"""

from __future__ import annotations

from wakekv.vllm.settings import Settings

__all__ = ["Settings", "register"]


def register() -> None:
    """The entry point of vllm.general_plugins, called in every process of the engine: does nothing unless asked."""
    if Settings.from_environment() is None:
        return
    from wakekv.vllm.plugin import install

    install()
