"""The text of one output while its tokens come: what can be shown, and where a stop string ends it."""

from collections.abc import Sequence

from fdel import text


class OutputText:
    """Turns one output's tokens to text; what may become a character or a stop string is held back. See `reply.Text`."""

    def __init__(self, tokenizer: text.Tokenizer, stops: Sequence[str] = ()):
        self.detokenizer, self.stops = text.Detokenizer(tokenizer), stops
        self.shown: list[str] = []
        self.pending = ""

    def push(self, tokens: Sequence[int], *, over: bool, stoppable: bool) -> tuple[str, bool]:
        """Take tokens: (the text to show, whether a stop string ends it). Nothing is held back of what is `over`."""
        self.detokenizer, new = text.step(self.detokenizer, tokens)
        self.pending += new + (text.flush(self.detokenizer) if over else "")
        end, found = len(self.pending), False
        if self.stops and stoppable:
            end, found = find_stop(self.pending, self.stops, final=over)
        shown, self.pending = self.pending[:end], self.pending[end:]
        self.shown.append(shown)
        return shown, found


def find_stop(pending: str, stops: Sequence[str], *, final: bool = False) -> tuple[int, bool]:
    """Find the first stop string: (its start, True); else (the end of what cannot be part of one, False)."""
    starts = [i for i in (pending.find(s) for s in stops) if i >= 0]
    if starts:
        return min(starts), True
    longest = 0 if final else min(len(pending), max(map(len, stops)) - 1)
    part = next((n for n in range(longest, 0, -1) if any(s.startswith(pending[-n:]) for s in stops)), 0)
    return len(pending) - part, False


def special_stops(tokenizer: text.Tokenizer, stops: Sequence[str]) -> frozenset[int]:
    """The ids of stop strings that are special tokens: their text is never shown, so the id ends the output."""
    return frozenset(tokenizer.special_ids) & {tokenizer.backend.token_to_id(s) for s in stops}
