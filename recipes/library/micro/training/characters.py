"""Room recipes: the micro model's vocabulary, in which each character is one token."""

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
TO_ID = bytes.maketrans(CHARACTERS.encode(), bytes(range(len(SPECIALS), len(SPECIALS) + len(CHARACTERS))))


def encode(text: str) -> list[int]:
    return list(text.encode().translate(TO_ID))
