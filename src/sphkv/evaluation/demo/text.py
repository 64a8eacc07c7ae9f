# SPDX-License-Identifier: Apache-2.0
"""A long document with facts hidden in it, made up by a generator."""

from __future__ import annotations

import random
from dataclasses import dataclass

_SUBJECTS = (
    "The keeper of the lighthouse", "A carpenter from the lower town", "The ferry captain",
    "An old schoolteacher", "The clerk of the customs house", "A travelling musician",
    "The widow who ran the inn", "A young surveyor", "The baker's eldest son", "The night watchman",
    "A trader in wool and tin", "The doctor of the garrison", "The gardener of the abbey",
)  # fmt: skip
_VERBS = (
    "walked along the harbour wall", "counted the barrels twice", "repaired the broken gate",
    "wrote a long letter to the council", "waited for the evening tide", "mended a torn sail",
    "argued about the price of salt", "carried lanterns down to the pier",
    "read aloud to the guests", "measured the depth of the channel", "painted the shutters blue",
    "asked after the missing cart",
    "listened to the storm on the roof", "kept the fire burning until dawn",
)  # fmt: skip
_REASONS = (
    "because the winter had come early", "while the bells rang for the market",
    "although nobody had asked for it", "so that the ships could leave before noon",
    "since the road over the hills was closed", "as the fog rolled in from the sea",
    "before the first guests arrived", "after the long meeting in the hall",
    "and spoke of it for many years", "without a word to the neighbours",
    "hoping that the harvest would be better", "until the last light faded",
)  # fmt: skip
# What is asked about, and what the answer may be. No two share their words: a small model that
# finds a fact at all then finds the right one.
_FACTS = (
    ("the pass number of the Falcon gate is", "What is the pass number of the Falcon gate?",
     ("52445", "71863", "90127")),
    ("the dog of the ferry captain is called", "What is the dog of the ferry captain called?",
     ("Biscuit", "Pepper", "Ginger")),
    ("the flag over the customs house is coloured",
     "What colour is the flag over the customs house?", ("purple", "orange", "silver")),
    ("the stolen clock came from the city of", "From which city did the stolen clock come?",
     ("Vienna", "Lisbon", "Cairo")),
    ("the new bridge was built by a man named", "Who built the new bridge?",
     ("Edmund", "Victor", "Oliver")),
    ("the treasure lies buried under the old", "Under what does the treasure lie buried?",
     ("windmill", "chapel", "stable")),
)  # fmt: skip
_DEPTHS = (0.08, 0.27, 0.46, 0.65, 0.84, 0.95)


@dataclass(frozen=True, slots=True)
class HiddenFact:
    """One fact of the document.

    Attributes:
        sentence: As it stands in the text.
        question: Text to append; the model continues it.
        answer: What the continuation must begin with.
    """

    sentence: str
    question: str
    answer: str


def hidden_facts(seed: int = 7) -> list[HiddenFact]:
    """Six facts of one word each; the seed chooses the words."""
    generator = random.Random(seed)
    facts = []
    for start, question, answers in _FACTS:
        answer = generator.choice(answers)
        facts.append(
            HiddenFact(
                sentence=f"Remember this well: {start} {answer}.",
                question=f"\n\nQuestion: {question}\nAnswer: According to the chronicle, {start}",
                answer=answer,
            )
        )
    return facts


def make_document(num_sentences: int, facts: list[HiddenFact], seed: int = 7) -> str:
    """Paragraphs of plain sentences with the facts at fixed depths."""
    generator = random.Random(seed + 1)
    sentences = []
    for _ in range(num_sentences):
        day, year = generator.randint(1, 28), generator.randint(1702, 1788)
        subject, verb = generator.choice(_SUBJECTS), generator.choice(_VERBS)
        reason = generator.choice(_REASONS)
        form = generator.randrange(3)
        if form == 0:
            sentences.append(f"{subject} {verb} {reason}.")
        elif form == 1:
            sentences.append(f"On day {day} of {year}, {subject[0].lower()}{subject[1:]} {verb}.")
        else:
            sentences.append(f"It is told that {subject[0].lower()}{subject[1:]} {verb} {reason}.")
    for fact, depth in zip(facts, _DEPTHS, strict=True):
        sentences.insert(int(depth * num_sentences), fact.sentence)
    paragraphs = [" ".join(sentences[at : at + 8]) for at in range(0, len(sentences), 8)]
    return "A chronicle of the harbour town.\n\n" + "\n\n".join(paragraphs)
