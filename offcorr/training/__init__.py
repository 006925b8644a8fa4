"""What any training loop needs: anchors, snapshots, replicas, schedules, the ESS learning rate, baselines."""
