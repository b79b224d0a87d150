"""What tests share: processes of their own, threads seen asleep."""
