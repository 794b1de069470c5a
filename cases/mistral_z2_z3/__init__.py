"""DeepSpeed issue 5188: fine-tuning Mistral gives another loss under ZeRO-3 than under ZeRO-2."""
