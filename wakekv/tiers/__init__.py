"""The tiers of the text on KV cache management, each a fast tier for the reversible cache.

text.py sentences by token ids; tokens.py tokens on the fast tier; index.py vectors of what is away; recall.py what
comes back; cache.py the cache; sentences.py, a tier of sentences; panel.py caches side by side.
"""

from wakekv.tiers.cache import TieredCache
from wakekv.tiers.sentences import Sentences
from wakekv.tiers.text import Splitter, ends_of

__all__ = ["Sentences", "Splitter", "TieredCache", "ends_of"]
