"""Declare where each ZeRO optimizer family holds its gradients, one file a family.

Only this package names deepspeed. An adapter is data: which method, before or after, which
argument or attribute holds the tensor, how its spans are found, on which stream it is valid.
`select` looks at what a class has, never at a version number.
"""
