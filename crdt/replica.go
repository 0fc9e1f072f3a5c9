// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import "fmt"

// Replica names one life of one process. What it counts it alone writes, so two
// lives must never share a Replica: a process that starts again takes a higher
// Incarnation, such as the wall time of its start in nanoseconds.
type Replica struct {
	Name        string // stable over restarts; not empty
	Incarnation uint64 // of this life; higher is later
}

func (r Replica) String() string { return fmt.Sprintf("%s#%x", r.Name, r.Incarnation) }
