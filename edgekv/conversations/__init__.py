"""One model, many conversations: which of them a prompt goes on from, where the others wait, and
what is kept of them on disk.
"""

from edgekv.conversations.pool import Conversations
from edgekv.conversations.talk import Talk

__all__ = ["Conversations", "Talk"]
