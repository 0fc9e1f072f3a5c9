// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

// Revision is up to where the watch has told.
func (a *Authority) Revision() int64 {
	a.core.Lock()
	defer a.core.Unlock()
	return a.core.rev
}
