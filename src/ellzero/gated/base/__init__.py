"""What `Gated` is built on, one above the other: what it shows of its model, its noise, what its gates say."""
