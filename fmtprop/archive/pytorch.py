"""PyTorch's names without a public path that reading a file takes."""


def define_quantized_operators() -> None:
    """Have PyTorch define the operators of its quantized programs, which it does only on request."""
    import torch.ao.quantization.fx._decomposed
