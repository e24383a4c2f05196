"""What the nano policy is made of: network, tokenizer, chat template, demonstrations, warm start, cache."""
