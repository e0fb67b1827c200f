"""`fsdp-compile plan`: what a training step takes on hardware that is not there, and whether it fits.

    target     the model, from module:function or a Hugging Face config, on meta
    layers     which of its layers repeat; the same model with fewer of them
    joint      the joint graph of a step, traced on a pretended group of ranks
    steps      what a lowered graph does, one after the other, in seconds and bytes by kind
    extend     the same of a model with more layers, from what each layer added
    forecast   one configuration: peak by kind, seconds, exposed communication, tokens a second
    sweep      many of them; the best
    options    what was asked for; show: tables and sentences
"""
