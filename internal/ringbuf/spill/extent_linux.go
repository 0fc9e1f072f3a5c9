// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import "os"

const seekHole = 4

// allocated is how much of a file the disk has given room to, from its beginning. A crash
// may have left a file longer than that.
func allocated(f *os.File) (int64, error) {
	end, err := f.Seek(0, 2)
	if err != nil || end == 0 {
		return end, err
	}
	if hole, err := f.Seek(0, seekHole); err == nil {
		return hole / 512 * 512, nil
	}
	return end, nil // the file system does not know
}
