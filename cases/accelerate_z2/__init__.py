"""accelerate issue 3877: gradient accumulation is worse under ZeRO-2 alone."""
