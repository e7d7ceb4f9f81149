"""What the SGLang linker costs. Needs no SGLang."""
