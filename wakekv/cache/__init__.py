"""The real cache: pages that leave the fast tier and come back, for transformers.

reservoir.py the slow tier; pool.py the fast one, shared.py where heads share it; layer.py a layer's pages in both;
reading.py how they are read; wants.py what is wanted, as it is; host.py, settling.py, swapping.py what comes and goes;
steps.py a decoded token; loops.py the same, compiled; books.py what it costs; settings.py the arguments; cache.py the
cache itself.
"""

from wakekv.cache.cache import ReversibleCache

__all__ = ["ReversibleCache"]
