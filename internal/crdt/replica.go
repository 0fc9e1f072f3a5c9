// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"cmp"
	"fmt"
	"strings"
)

// maxName is the longest name of a [Replica], in bytes.
const maxName = 255

// Replica names one incarnation of one process. Only that incarnation writes its counts, so
// two incarnations must never share a Replica. A process that starts again takes a higher
// Incarnation, such as the wall time of its start in nanoseconds.
type Replica struct {
	Name        string // stable over restarts; 1 to maxName bytes
	Incarnation uint64 // higher is later
}

func (r Replica) String() string { return fmt.Sprintf("%s#%x", r.Name, r.Incarnation) }

// Compare orders replicas by name, then incarnation: -1, 0 or +1.
func (r Replica) Compare(o Replica) int {
	return cmp.Or(cmp.Compare(r.Name, o.Name), cmp.Compare(r.Incarnation, o.Incarnation))
}

// Validate returns an error if the name is empty or too long.
func (r Replica) Validate() error {
	if len(r.Name) == 0 || len(r.Name) > maxName {
		return argument("length of Replica.Name", len(r.Name), fmt.Sprintf("1 to %d bytes", maxName))
	}
	return nil
}

// kept returns r with a copy of the name, for a name that is part of a message.
func (r Replica) kept() Replica {
	r.Name = strings.Clone(r.Name)
	return r
}
