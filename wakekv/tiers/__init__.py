"""The tiers of the text on KV cache management, each a fast tier for the reversible cache.

cache.py the cache; tokens.py exact tokens on the fast tier; text.py sentences by token ids; index.py vectors of what is
away; recall.py what comes back; sentences.py a tier of sentences; nearest.py one by similarity alone; codes.py numbers
as codes, and products on them; quantised.py a tier of codes; rope.py keys before their rotation; merging.py tiers of
what is alike; panel.py caches side by side; methods.py what is on trial; trial.py the trial.
"""

from wakekv.tiers.cache import TieredCache
from wakekv.tiers.quantised import Quantised
from wakekv.tiers.sentences import Sentences
from wakekv.tiers.text import Splitter, ends_of

__all__ = ["Quantised", "Sentences", "Splitter", "TieredCache", "ends_of"]
