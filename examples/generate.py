# SPDX-License-Identifier: Apache-2.0
"""Answer from a long prompt with a coded cache, and see what it holds."""

import sphkv

FACTS = [("harbour", "Quillmere"), ("library", "Ostend Row"), ("windmill", "Farrow Hill")]


def main() -> None:
    model, tokenizer = sphkv.load_model("smollm2")
    filler = "The road went on between low hedges, and nothing much happened for an hour. "
    text = "".join(f"The {thing} is at {place}. " + filler * 12 for thing, place in FACTS)
    prompt = text + "Question: where is the library? Answer: the library is at"
    inputs = tokenizer(prompt, return_tensors="pt")
    with sphkv.SphericalCache.for_model(model, tiers="k3v4") as cache:
        output = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
        tokens = cache.get_seq_length()
        dense = cache.config.geometry.dense_bytes_per_token * tokens
        print(f"prompt of {inputs.input_ids.shape[1]} tokens, answer:{answer!r}")
        print(f"{cache.ledger().total} resident bytes, dense would be {dense}")
        for kind, size in cache.ledger().to_dict().items():
            print(f"  {kind:10} {size}")


if __name__ == "__main__":
    main()
