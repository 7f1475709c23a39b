"""Files behind one interface: whatever must outlive a process is read and written through `csd_io.folder`."""
