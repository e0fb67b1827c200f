"""What is sent: how a parameter lies in a shard and a bucket, the programs of collectives, the record of launches."""
