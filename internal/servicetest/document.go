package servicetest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"sync"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"
)

// Document is openapi.yaml as the service serves it.
type Document struct {
	*openapi3.T
	router routers.Router
	seen   sync.Map // the shapes of answers that were held against it and found good
}

// The document is the same for every replica of a test binary, and reading it takes a while.
var (
	documentOnce sync.Once
	document     *Document
	documentErr  error
)

func readDocument(baseURL string) (*Document, error) {
	documentOnce.Do(func() { document, documentErr = loadDocument(baseURL) })
	return document, documentErr
}

func loadDocument(baseURL string) (*Document, error) {
	response, err := http.Get(baseURL + "/openapi.yaml")
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	parsed, err := openapi3.NewLoader().LoadFromData(content)
	if err != nil {
		return nil, err
	}
	if err := parsed.Validate(context.Background()); err != nil {
		return nil, err
	}
	parsed.Servers = nil // The test's replicas listen wherever there is a port.
	router, err := gorillamux.NewRouter(parsed)
	openapi3filter.RegisterBodyDecoder("text/html", openapi3filter.PlainBodyDecoder)
	return &Document{T: parsed, router: router}, err
}

// Fault says what about an answer the document does not declare: its status, a header, its media type, its body. It is nil for a request
// that the document has no operation for, and for HEAD, which is GET without the body.
func (d *Document) Fault(request *http.Request, status int, header http.Header, body []byte) error {
	if request.Method == http.MethodHead {
		return nil
	}
	route, params, err := d.router.FindRoute(request)
	if err != nil {
		return nil //nolint:nilerr // no such operation: 404 or 405, which other tests are about
	}
	// The validator compiles its schemas anew for every answer, which costs more than all the rest of a test.
	shape := fmt.Sprint(route.Operation.OperationID, status, shapeOf(header, body))
	if _, seen := d.seen.Load(shape); seen {
		return nil
	}
	err = openapi3filter.ValidateResponse(request.Context(), &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: request, PathParams: params, Route: route},
		Status:                 status,
		Header:                 header,
		Body:                   io.NopCloser(bytes.NewReader(body)),
		Options:                &openapi3filter.Options{IncludeResponseStatus: true, MultiError: true},
	})
	if err != nil {
		return fmt.Errorf("%s does not declare it: %w", route.Operation.OperationID, err)
	}
	d.seen.Store(shape, true)
	return nil
}

// shapeOf is what a document can declare of an answer: its headers by name, its members by name and type, and those words in it that are
// some of a few. Two answers of one shape differ in ids, amounts, times and texts.
func shapeOf(header http.Header, body []byte) string {
	names := slices.Sorted(maps.Keys(header))
	var value any
	if json.Unmarshal(body, &value) != nil {
		return fmt.Sprint(names, header["Content-Type"], body)
	}
	return fmt.Sprint(names, header["Content-Type"], header["Idempotent-Replayed"], skeleton("", value))
}

// few are the members whose values are some of a few words.
var few = map[string]bool{"type": true, "status": true, "title": true, "outcome": true, "retry": true, "code": true, "failure_code": true, "decline_code": true, "currency": true}

func skeleton(name string, value any) any {
	switch value := value.(type) {
	case map[string]any:
		bones := make(map[string]any, len(value)) // which fmt prints in the order of the names
		for name, member := range value {
			bones[name] = skeleton(name, member)
		}
		return bones
	case []any:
		kinds := map[string]bool{}
		for _, element := range value {
			kinds[fmt.Sprint(skeleton(name, element))] = true
		}
		return kinds
	case string:
		if few[name] {
			return value
		}
	}
	return fmt.Sprintf("%T", value)
}
