"""What tests share: tiny models, made-up data, several processes, pretended devices."""
